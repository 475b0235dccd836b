"""What the scripts share: gin files, flags, a run's folder, errors in one line, reports."""
