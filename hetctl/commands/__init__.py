"""One file per command: read what was asked, call the house below, hand the result to the sink."""
