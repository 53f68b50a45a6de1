"""Common parts of commands: options, settings, progress, reports."""
