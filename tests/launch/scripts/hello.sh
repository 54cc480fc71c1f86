#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
echo WORLD_SIZE=$WORLD_SIZE
