"""Tables whose rows live with owners: no worker holds a whole one."""
