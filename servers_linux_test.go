package redislock

import "syscall"

func init() { dieWithParent = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
