"""The page that shows a cluster: who has which slots, since when, and why."""
