# SPDX-License-Identifier: Apache-2.0
"""The controller's logic: what happened and what is known go in, a new state and commands come out.

`state` holds all that a decision may depend on, as tables of values; `guards` says what may not be done now;
`controller` gathers reports into incidents, asks the policy, and is the class that users extend.
"""
