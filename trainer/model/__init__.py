"""The transformers hetctl trains: their shapes, their parts, and the folders they come from."""
