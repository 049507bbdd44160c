"""How commands and code reach hosts: shells, deadlines, many hosts at once, what travels there."""
