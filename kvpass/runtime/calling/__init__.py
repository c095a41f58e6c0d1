"""Call a compiled model: convert the arguments, trace equal layers once, and notice ordinary caches."""
