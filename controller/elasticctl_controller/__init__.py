"""A minimal Kubernetes controller for ElasticJobs, and the rendezvous service its workers meet at."""
