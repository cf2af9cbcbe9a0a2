"""What has to be in order before jobs run well at a place, looked at one by one; `elasticctl doctor` shows it."""
