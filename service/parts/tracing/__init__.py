"""OpenTelemetry traces: which calls are traced, what spans they become, and how they are sent.

Nothing here is imported while nothing is traced.
"""
