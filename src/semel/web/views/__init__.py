"""One file for each part of the site: what it asks of the cluster, and its pages."""
