# SPDX-License-Identifier: Apache-2.0
"""The processes of the supervisor: sensor, controller and actuator, each a thin shell around its logic.

Each may be killed, stopped or started again at any time, alone or with the others: what one forgets, another
one tells it again when they meet.  Nothing is queued for a part that is away; the newest state is sent when
it is back.
"""
