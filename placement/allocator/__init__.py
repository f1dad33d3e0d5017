"""The cluster's allocator: a pure core, and the actor around it."""
