"""`elasticctl dashboard`: one page of jobs in a browser, live, served on this machine's loopback to its user alone."""
