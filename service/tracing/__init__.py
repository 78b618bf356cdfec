"""OpenTelemetry traces: which calls are traced, the spans that they become, and their way out.

Nothing here is imported while nothing is traced.
"""
