"""Where jobs run: one small Protocol (`base`), Kubernetes (`kube`) and this machine (`local`)."""
