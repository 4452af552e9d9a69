"""Anthropic's Messages API: conversion of requests to chats, and of their answers."""
