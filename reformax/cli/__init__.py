"""The parts of the scripts: gin files, flags, a run's folder, errors in one line, reports."""
