"""Facts about a graph and rewrites of it. Knows torch; knows no plan, no cluster and no process."""
