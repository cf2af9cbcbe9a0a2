"""What a job would take at other sizes, from a scaling curve and what interruptions cost. Pure."""

from elasticctl.simulation.curve import Curve, Point
from elasticctl.simulation.evidence import Evidence, evidence_of
from elasticctl.simulation.outlook import Conditions, Outlook, outlook

__all__ = ["Conditions", "Curve", "Evidence", "Outlook", "Point", "evidence_of", "outlook"]
