"""Forecasts of time, cost and goodput at other sizes, from a scaling curve and the cost of interruptions."""

from elasticctl.planning.scaling_curve import Point, ScalingCurve
from elasticctl.simulation.forecast import Conditions, Forecast, forecast_for
from elasticctl.simulation.scaling import Evidence, evidence_of

__all__ = ["Conditions", "Evidence", "Forecast", "Point", "ScalingCurve", "evidence_of", "forecast_for"]
