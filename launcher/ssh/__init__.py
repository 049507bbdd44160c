"""SSH, the only place that knows paramiko: routes from ~/.ssh/config, verified host keys, sessions with deadlines."""
