"""The pipeline: schedules as data, what runs them, and what crosses between stages."""
