"""The published experiment on two hosts: scripts around real servers, and a chart."""
