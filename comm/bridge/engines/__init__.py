"""Kept engines that move registered memory between processes, behind one small adapter; imported only when used."""
