package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"

	"example.com/redislock"
	"example.com/redislock/faults/history"
)

// progress counts what the histories of a campaign say while they are still being written.
type progress struct {
	dir    string
	cycles int
	faults map[string]int
	read   map[string]int64 // by file
}

// update reads what has been added.
func (p *progress) update() error {
	if p.read == nil {
		p.read, p.faults = make(map[string]int64), make(map[string]int)
	}
	names, err := filepath.Glob(filepath.Join(p.dir, "*.jsonl"))
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := p.add(name); err != nil {
			return err
		}
	}
	return nil
}

func (p *progress) add(name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	data, err := io.ReadAll(io.NewSectionReader(file, p.read[name], 1<<40))
	if err != nil {
		return err
	}
	whole := bytes.LastIndexByte(data, '\n') + 1
	p.read[name] += int64(whole)
	for line := range bytes.Lines(data[:whole]) {
		var r struct{ Kind, Fault string }
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		switch r.Kind {
		case string(redislock.EventReleased), string(redislock.EventLost), string(redislock.EventAbandoned):
			p.cycles++
		case history.KindFault:
			p.faults[r.Fault]++
		}
	}
	return nil
}
