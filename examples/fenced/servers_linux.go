package main

import "syscall"

func init() { dieWithParent = func(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL } }
