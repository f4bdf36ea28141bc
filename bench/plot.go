package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
)

// plot is lines over a logarithmic x axis.
type plot struct {
	title, x, y string
	logY        bool
	lines       []line
}

type line struct {
	name string
	x, y []float64
}

// Where things are in the picture. The legend is on the right.
const (
	plotWidth, plotHeight     = 850, 400
	left, right, top, bottom  = 70.0, 530.0, 44.0, 346.0
	legendLeft, legendSpacing = 550, 22
)

// plotStyle has colors that most eyes tell apart, on white and on black. Markers differ, too, and are fewer, so that the
// eighth line is like none before.
const plotStyle = `<style>
text{font:12px sans-serif;fill:#1f2328}.title{font-size:15px;font-weight:bold}.end{text-anchor:end}.mid{text-anchor:middle}
.page{fill:#fff}.grid{stroke:#d8dee4}.line{fill:none;stroke-width:2}
.c0{stroke:#0072b2}.c1{stroke:#d55e00}.c2{stroke:#009e73}.c3{stroke:#b8528f}.c4{stroke:#b98900}.c5{stroke:#6e7781}.c6{stroke:#8250df}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.grid{stroke:#30363d}.c0{stroke:#4aa8e0}}
</style>
`

// markers are drawn around the current point.
var markers = []string{"m-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "m-4,-4h8v8h-8z", "m0,-5l5,9h-10z", "m0,-5l5,5l-5,5l-5,-5z", "m-4,-4l8,8m0,-8l-8,8", "m0,-5v10m-5,-5h10"}

// chart draws a plot as SVG, for light and dark pages. What has no place on a logarithmic axis is left out.
func chart(c plot) []byte {
	x := newAxis(true, left, right)
	y := newAxis(c.logY, bottom, top)
	for _, l := range c.lines {
		x.include(l.x)
		y.include(l.y)
	}
	ticks := y.ticks()
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img">`+"\n<title>%s</title>\n%s", plotWidth, plotHeight, html.EscapeString(c.title), plotStyle)
	fmt.Fprintf(&b, `<rect class="page" width="%d" height="%d"/>`+"\n", plotWidth, plotHeight)
	text(&b, left, 24, "title", c.title)
	text(&b, (left+right)/2, plotHeight-14, "mid", c.x)
	fmt.Fprintf(&b, `<text class="mid" transform="translate(18,%.0f) rotate(-90)">%s</text>`+"\n", (top+bottom)/2, html.EscapeString(c.y))
	for _, v := range x.points {
		text(&b, x.at(v), bottom+18, "mid", number(v))
	}
	for _, v := range ticks {
		fmt.Fprintf(&b, `<path class="grid" d="M%.0f,%.1fH%.0f"/>`+"\n", left, y.at(v), right)
		text(&b, left-8, y.at(v)+4, "end", number(v))
	}
	for i, l := range c.lines {
		var path, marks bytes.Buffer
		command := "M"
		for j := range min(len(l.x), len(l.y)) {
			if !x.has(l.x[j]) || !y.has(l.y[j]) {
				continue
			}
			at := fmt.Sprintf("%.1f,%.1f", x.at(l.x[j]), y.at(l.y[j]))
			fmt.Fprintf(&path, "%s%s", command, at)
			fmt.Fprintf(&marks, "M%s%s", at, markers[i%len(markers)])
			command = "L"
		}
		height := int(top) + 10 + i*legendSpacing
		fmt.Fprintf(&marks, "M%d,%d%s", legendLeft, height, markers[i%len(markers)])
		fmt.Fprintf(&b, `<path class="line c%d" d="%s%s"/>`+"\n", i%7, &path, &marks)
		text(&b, legendLeft+14, float64(height)+4, "name", l.name)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func text(b *bytes.Buffer, x, y float64, class, s string) {
	fmt.Fprintf(b, `<text class="%s" x="%.1f" y="%.1f">%s</text>`+"\n", class, x, y, html.EscapeString(s))
}

// axis maps values to places in the picture.
type axis struct {
	log      bool
	from, to float64 // places of the least and the greatest value
	points   []float64
	min, max float64
}

func newAxis(log bool, from, to float64) *axis {
	return &axis{log: log, from: from, to: to, min: math.Inf(1), max: math.Inf(-1)}
}

// has reports whether a value has a place on the axis.
func (a *axis) has(v float64) bool {
	return !math.IsNaN(v) && !math.IsInf(v, 0) && (v > 0 || !a.log)
}

func (a *axis) include(values []float64) {
	for _, v := range values {
		if !a.has(v) {
			continue
		}
		a.min, a.max = min(a.min, v), max(a.max, v)
		if !slices.Contains(a.points, v) {
			a.points = append(a.points, v)
		}
	}
}

// ticks are 1, 2 and 5 times the powers of ten or, on a linear axis, even steps from 0. The axis is widened to the outermost.
func (a *axis) ticks() (values []float64) {
	switch {
	case a.log && a.max < a.min: // nothing has a place
		a.min, a.max = 1, 10
	case !a.log:
		a.min, a.max = 0, max(a.max, 1e-9)
	}
	if a.log {
		for e := math.Floor(math.Log10(a.min)); len(values) == 0 || values[len(values)-1] < a.max; e++ {
			for _, m := range []float64{1, 2, 5} {
				v := m * math.Pow(10, e)
				if v <= a.min {
					values = values[:0] // only the last that is not above
				}
				if len(values) == 0 || values[len(values)-1] < a.max {
					values = append(values, v)
				}
			}
		}
	} else {
		step := a.step()
		for i := 0; len(values) == 0 || values[len(values)-1] < a.max; i++ {
			values = append(values, float64(i)*step)
		}
	}
	a.min, a.max = values[0], values[len(values)-1]
	return values
}

// step is 1, 2, 5 or 10 times a power of ten, for at most eight ticks.
func (a *axis) step() float64 {
	power := math.Pow(10, math.Floor(math.Log10(a.max/2)))
	for _, m := range []float64{1, 2, 5} {
		if a.max/(m*power) <= 7 {
			return m * power
		}
	}
	return 10 * power
}

func (a *axis) at(v float64) float64 {
	least, most := a.min, a.max
	if a.log {
		v, least, most = math.Log(v), math.Log(least), math.Log(most)
	}
	if most == least {
		return (a.from + a.to) / 2
	}
	return a.from + (v-least)/(most-least)*(a.to-a.from)
}

// number writes large values with commas and small ones without an exponent.
func number(v float64) string {
	if v < 1000 {
		return strconv.FormatFloat(v, 'f', -1, 32) // 32: without the last digits of 3 * 0.1
	}
	s := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
