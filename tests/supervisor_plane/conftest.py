# SPDX-License-Identifier: Apache-2.0
"""The same warm gRPC and certificates as for tests of the wire."""

from tests.supervisor_wire.conftest import authority, grpc_is_warm

__all__ = ["authority", "grpc_is_warm"]
