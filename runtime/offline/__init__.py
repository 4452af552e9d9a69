"""Code that does not serve: conversion, factorization, quality and benchmarks."""
