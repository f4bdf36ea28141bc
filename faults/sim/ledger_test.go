package sim

import (
	"testing"
	"time"

	"example.com/redislock/faults/history"
	"example.com/redislock/internal/virtual"
	"github.com/alicebob/miniredis/v2"
)

// TestLedger lets Redis do to a lock what it must not.
func TestLedger(t *testing.T) {
	const key = prefix + "{k}"
	script := func(args ...string) virtual.Command {
		return virtual.Command{Name: "EVALSHA", Script: "sha", Args: append([]string{"sha", "1", key}, args...)}
	}
	type step struct {
		command virtual.Command
		reply   string
	}
	acquire := func(value, reply string) step {
		return step{virtual.Command{Name: "SET", Args: []string{key, value, "nx", "get", "px", "1000"}}, reply}
	}
	fenced := func(value, reply string) step {
		return step{virtual.Command{Name: "EVALSHA", Script: "sha", Args: []string{"sha", "2", key, key + ":fence", value, "1000", "9"}}, reply}
	}
	extend := func(value, reply string) step { return step{script(value, "1000"), reply} }
	release := func(value, reply string) step { return step{script(value), reply} }
	done := func(value, marker, reply string) step { return step{script(value, marker, "1000"), reply} }
	for name, test := range map[string]struct {
		steps []step
		bad   int
	}{
		"one after the other":       {[]step{acquire("a", "$-1"), extend("a", ":1"), acquire("b", "$1\r\na"), release("a", ":1"), acquire("b", "$-1"), release("b", ":1")}, 0},
		"a done marker":             {[]step{acquire("a", "$-1"), done("a", "m", ":1"), done("a", "m", ":1"), acquire("b", "$1\r\nm"), extend("a", ":0"), release("a", ":-1")}, 0},
		"a marker where nothing is": {[]step{done("a", "m", ":1")}, 0},
		"fenced":                    {[]step{fenced("a", "*2\r\n$1\r\na\r\n$1\r\n7"), fenced("a", "*2\r\n$1\r\na\r\n$1\r\n7"), fenced("b", "*2\r\n$1\r\na\r\n$-1")}, 0},
		"an error says nothing":     {[]step{acquire("a", "-OOM"), release("a", "-NOSCRIPT")}, 0},
		"a lock of two":             {[]step{acquire("a", "$-1"), acquire("b", "$-1")}, 1},
		"a fenced lock of two":      {[]step{fenced("a", "*2\r\n$1\r\na\r\n$1\r\n7"), fenced("b", "*2\r\n$1\r\nb\r\n$1\r\n8")}, 1},
		"another's extension":       {[]step{acquire("a", "$-1"), extend("b", ":1")}, 1},
		"made by an extension":      {[]step{extend("a", ":1")}, 1},
		"refused for nothing":       {[]step{acquire("a", "$-1"), extend("a", ":0")}, 1},
		"another's release":         {[]step{acquire("a", "$-1"), release("b", ":1")}, 1},
		"released in vain":          {[]step{acquire("a", "$-1"), release("a", ":0")}, 1},
		"a marker over another's":   {[]step{acquire("a", "$-1"), done("b", "m", ":1")}, 1},
		"deleted without a look":    {[]step{{virtual.Command{Name: "DEL", Args: []string{key}}, ":1"}}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			w := &world{World: &virtual.World{Began: time.Now(), Redis: miniredis.NewMiniRedis()}}
			w.ledger = newLedger(w)
			for _, s := range test.steps {
				w.ledger.see("h0", s.command, []byte(s.reply+"\r\n"))
			}
			bad := 0
			for _, r := range w.records {
				if r.Kind == history.KindModel {
					bad++
				}
			}
			if bad != test.bad {
				t.Errorf("%d complaints, want %d: %+v", bad, test.bad, w.records)
			}
		})
	}
}
