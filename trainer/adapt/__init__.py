"""Plans that follow measured speeds: who is slow, other counts, other cuts. Pure."""
