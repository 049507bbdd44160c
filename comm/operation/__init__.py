"""What one operation is made of: its handle, the memory it works on, who holds what, how it is recorded."""
