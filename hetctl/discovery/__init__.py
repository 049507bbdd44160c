"""What is there: the hosts a person names, what each says of itself, and the cluster that this makes."""
