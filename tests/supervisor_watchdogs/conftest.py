# SPDX-License-Identifier: Apache-2.0
"""The same warm gRPC as for tests of the wire."""

from tests.supervisor_wire.conftest import grpc_is_warm

__all__ = ["grpc_is_warm"]
