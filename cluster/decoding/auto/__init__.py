"""Policy `auto`: what it can choose, what it believes of times, what it forecasts and decides."""
