"""The embedded cluster: pods are processes of this machine."""
