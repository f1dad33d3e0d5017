"""What there is to share out, and who asks for it."""
