package postgres

import "syscall"

func init() { dieWithParent = func(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGINT } }
