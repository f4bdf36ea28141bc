//go:build race

package sim

func init() { slow = true }
