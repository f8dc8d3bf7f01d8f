"""Pages of reports: one HTML file each, without other files and without network."""
