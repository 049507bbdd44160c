"""Who does what, why, and how fast it will be: pure, and without torch."""
