"""What ranks run to measure a bridge, and to prove that it carries and adds exactly."""
