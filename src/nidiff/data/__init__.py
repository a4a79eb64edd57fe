"""Data sets [N, C, *event]: images, signals, fields, volumes and video, with their units and coordinates."""
