"""Sandbox: a program of somebody's runs with neither files, network, processes nor secrets of this one's."""
