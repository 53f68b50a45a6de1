"""What commands share: options, settings, progress, reports."""
