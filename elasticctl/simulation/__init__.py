"""What a job would take at other sizes, from a scaling curve and what interruptions cost. Pure."""

from elasticctl.simulation.evidence import Evidence, evidence_of
from elasticctl.simulation.outlook import Conditions, Outlook, outlook
from elasticctl.simulation.scaling_curve import Curve, Point

__all__ = ["Conditions", "Curve", "Evidence", "Outlook", "Point", "evidence_of", "outlook"]
