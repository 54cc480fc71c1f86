# SPDX-License-Identifier: Apache-2.0
"""Which process serves each service of the protocol, and which one may make each call.

A server answers a call by this table, and a client asks only a server that proves to be the one named here.
A service or a call without an entry cannot be served.
"""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """What a process is; the value is the DNS name that says so in its certificate."""

    HOST = "resiliency-host"
    SENSOR = "resiliency-sensor"
    CONTROLLER = "resiliency-controller"
    ACTUATOR = "resiliency-actuator"
    OPERATOR = "resiliency-operator"


#: All but training hosts: what a control token stands for.
CONTROL = frozenset(Role) - {Role.HOST}

#: Service -> the process that serves it.
SERVERS = {
    "Sensor": Role.SENSOR,
    "Controller": Role.CONTROLLER,
    "Operator": Role.CONTROLLER,
    "Actuator": Role.ACTUATOR,
    "HostDaemon": Role.HOST,
}
#: Call -> the only process that may make it.
CALLERS = {
    "Sensor.Connect": Role.HOST,
    "Sensor.CheckEvidence": Role.ACTUATOR,
    "Sensor.ReportChange": Role.ACTUATOR,
    "Sensor.ListSights": Role.CONTROLLER,
    "Sensor.Thaw": Role.CONTROLLER,
    "Controller.ReportEvents": Role.SENSOR,
    "Controller.ReportOutcomes": Role.ACTUATOR,
    "Controller.ListKnown": Role.SENSOR,
    "Operator.Status": Role.OPERATOR,
    "Operator.Act": Role.OPERATOR,
    "Operator.History": Role.OPERATOR,
    "Actuator.Connect": Role.HOST,
    "Actuator.Execute": Role.CONTROLLER,
    "Actuator.LookAtHost": Role.SENSOR,
    "HostDaemon.Probe": Role.SENSOR,
}
