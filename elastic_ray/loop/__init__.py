"""What a train loop calls, and the session that its thread belongs to."""
