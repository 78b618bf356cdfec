"""Estimators of scikit-learn for tables and texts, from files of skops."""
