"""What README and docs/ claim but could not be tried on every hardware, as claims that a volunteer's machines judge."""
