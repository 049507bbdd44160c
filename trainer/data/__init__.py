"""From files to the samples of a step, the same whatever the layout."""
