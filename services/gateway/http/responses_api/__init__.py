"""OpenAI's Responses API: conversion of requests to chats, and of their answers."""
